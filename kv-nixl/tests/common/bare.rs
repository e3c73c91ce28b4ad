//! The library driven bare, as the hazards' negative controls need it: no rule of ours is kept here.

use std::ffi::{CString, c_char};
use std::ptr::null_mut;

use nixl_capi_sys::{AgentConfig, Api, Handle, OP_WRITE, SYNC_RW, mem, status};

pub struct Bare {
    pub api: Api,
    agent: Handle,
}

fn ok(code: i32) {
    assert_eq!(code, status::SUCCESS, "{}", status::name(code));
}

impl Bare {
    pub fn new(name: &str, errors: &str) -> Self {
        kv_nixl::prepare_environment();
        let api = Api::open(None).unwrap();
        let name = CString::new(name).unwrap();
        let config = AgentConfig {
            progress_thread: true,
            listen_thread: false,
            listen_port: 0,
            sync: SYNC_RW,
            workers: 1,
            progress_delay_us: 100_000,
            listen_delay_us: 100_000,
            telemetry: false,
        };
        let (mut agent, mut params, mut backend) = (null_mut(), null_mut(), null_mut());
        // SAFETY: live handles, strings that end in 0, places for the results.
        unsafe {
            ok((api.create_configured_agent)(name.as_ptr(), &raw const config, &raw mut agent));
            ok((api.create_params)(&raw mut params));
            let errors = CString::new(errors).unwrap();
            ok((api.params_add)(params, c"ucx_error_handling_mode".as_ptr(), errors.as_ptr()));
            ok((api.create_backend)(agent, c"UCX".as_ptr(), params, &raw mut backend));
            (api.destroy_params)(params);
        }
        Self { api, agent }
    }

    pub fn register(&self, addr: u64, len: u64) {
        let mut list = null_mut();
        // SAFETY: live handles; the caller keeps the memory.
        unsafe {
            ok((self.api.create_reg_dlist)(mem::DRAM, &raw mut list));
            ok((self.api.reg_dlist_add_desc)(list, addr as usize, len as usize, 0, std::ptr::null(), 0));
            ok((self.api.register_mem)(self.agent, list, null_mut()));
            (self.api.destroy_reg_dlist)(list);
        }
    }

    /// The status of loading.
    pub fn load(&self, metadata: &[u8]) -> i32 {
        let mut name: *mut c_char = null_mut();
        // SAFETY: live agent, bytes with their length, a place for the name.
        let code =
            unsafe { (self.api.load_remote_md)(self.agent, metadata.as_ptr().cast(), metadata.len(), &raw mut name) };
        // SAFETY: null, or the library's to free.
        unsafe { nixl_capi_sys::free(name.cast()) };
        code
    }

    pub fn invalidate(&self, name: &str) -> i32 {
        let name = CString::new(name).unwrap();
        // SAFETY: live agent, a string that ends in 0.
        unsafe { (self.api.invalidate_remote_md)(self.agent, name.as_ptr()) }
    }

    /// A write, not posted.
    pub fn create(&self, name: &str, from: u64, to: u64, len: u64) -> Result<Handle, i32> {
        let name = CString::new(name).unwrap();
        let (mut local, mut remote, mut request) = (null_mut(), null_mut(), null_mut());
        // SAFETY: live handles, a string that ends in 0, places for the results.
        unsafe {
            for (list, addr) in [(&raw mut local, from), (&raw mut remote, to)] {
                ok((self.api.create_xfer_dlist)(mem::DRAM, list));
                ok((self.api.xfer_dlist_add_desc)(*list, addr as usize, len as usize, 0));
            }
            let code = (self.api.create_xfer_req)(
                self.agent,
                OP_WRITE,
                local,
                remote,
                name.as_ptr(),
                &raw mut request,
                null_mut(),
            );
            (self.api.destroy_xfer_dlist)(local);
            (self.api.destroy_xfer_dlist)(remote);
            if code == status::SUCCESS { Ok(request) } else { Err(code) }
        }
    }

    pub fn post(&self, request: Handle) -> i32 {
        // SAFETY: live handles.
        unsafe { (self.api.post_xfer_req)(self.agent, request, null_mut()) }
    }

    pub fn status(&self, request: Handle) -> i32 {
        // SAFETY: live handles.
        unsafe { (self.api.get_xfer_status)(self.agent, request) }
    }

    pub fn release(&self, request: Handle) -> i32 {
        // SAFETY: live handles.
        unsafe { (self.api.release_xfer_req)(self.agent, request) }
    }
}
